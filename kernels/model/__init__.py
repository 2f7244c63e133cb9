"""The protocols in Promela, and a runner that proves them with spin."""
