"""Studies of histogram estimators: error, tuning and convergence, on synthetic users and on users of one's own."""
