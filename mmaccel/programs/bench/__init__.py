"""Speed and memory of real architectures under named workloads, bare and accelerated in turn."""
