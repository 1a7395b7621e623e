"""What an operator looks at: dashboards, alert rules, and how Prometheus finds the processes."""
