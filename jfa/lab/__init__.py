"""Tools of the notebooks: source and diffs, compile reports, measurements, error budgets, figures."""
