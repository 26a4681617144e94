"""Custom derivatives: edges, users' rules, stopped and replaced gradients."""
