"""Tables and figures of four papers as declared experiments, with the published values beside jaxpfl's."""
