"""How values are differentiated: the table of derivatives, linear forms, and where tangents are kept."""
