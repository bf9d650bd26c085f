"""Parts of several commands; no file in here is a command."""
