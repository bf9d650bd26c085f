"""``mini-smol``: a vision tower and a connector trained around SmolLM2-135M-Instruct."""
