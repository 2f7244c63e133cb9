"""From configuration files and command-line words to a `Plan`: what will be measured, and what it takes."""
