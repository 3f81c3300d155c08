"""What both workers share: checkpoints, KV slots, ragged batches and the model runner."""
