"""Studies of histogram estimators: error, tuning and convergence, on synthetic users and the user's own."""
