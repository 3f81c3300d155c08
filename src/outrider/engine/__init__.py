"""The model engine of both workers: checkpoints, KV slots, ragged batches and the model runner."""
