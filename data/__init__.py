"""From text to tokens to batches; the datasets themselves lie in folders beside these files."""
