"""The user's input: params, outputs, options, arrays for results."""
