"""From text to rows on disk, and from rows to batches."""
