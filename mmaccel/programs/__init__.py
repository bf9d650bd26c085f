"""Programs with an accelerated model: evaluation, streams of video, benchmarks, bulk video question answering."""
