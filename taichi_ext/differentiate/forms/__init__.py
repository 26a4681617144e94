"""Linear forms and their parts: values, statements, seeds, columns, places."""
