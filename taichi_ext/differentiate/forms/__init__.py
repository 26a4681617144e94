"""Linear forms and what they are made of: values, statements, seeds, columns, places."""
