"""Drafts of the next tokens by copying, one method a file, and the rules by which a model accepts drafts."""
