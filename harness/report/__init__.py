"""From runs to what is shown to others: one HTML page, the same in Markdown, tables, vector figures, an archive."""
