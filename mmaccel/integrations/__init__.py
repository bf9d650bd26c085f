"""Integrations with other programs: lmms-eval and vLLM. They are imported only when that program asks for them."""
