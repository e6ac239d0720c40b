"""One folder a question: the script, its rules written before the first run, its results, its figures."""
