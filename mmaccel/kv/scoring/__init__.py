"""What cache policies share: how much attention keys received, chunks of neighbours, copies."""
