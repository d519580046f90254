"""Personalised estimation, by closed forms and EM where the model is simple enough: functions of all clients' data."""

from jaxpfl.estimators import logistic_regression, regression, regression_mixture

__all__ = ["logistic_regression", "regression", "regression_mixture"]
