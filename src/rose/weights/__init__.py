"""Weights from the trainer to every rollout worker: codec, shards, chain, relays, publisher and receiver."""
