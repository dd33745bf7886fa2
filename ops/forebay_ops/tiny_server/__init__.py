"""A development inference server: Hugging Face models on CPU behind SGLang's HTTP protocol.

Continuous batching with a KV cache, per-token logprobs and weight versions, pauses, aborts and live weight updates.
It stands in for a GPU server in demos and tests; it is not meant to serve users.
"""
