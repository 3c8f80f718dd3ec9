"""The loop, the step, checkpoints and processes, for pretraining and fine-tuning."""
