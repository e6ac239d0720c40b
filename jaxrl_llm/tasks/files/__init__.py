"""Files of problems: their formats, columns, downloads and faults."""
