"""Fine-tuning on GLUE, SQuAD and tasks of one's own."""
