"""Turn text into tokens and tokens into batches. Datasets live in folders beside these files."""
