"""What users give: params, outputs, options, arrays for results."""
