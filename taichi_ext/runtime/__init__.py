"""One evaluation: its launches, the memory of tangents, the state of the program, stores from Python."""
