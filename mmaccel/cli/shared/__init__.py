"""What several commands share; no file in here is a command."""
