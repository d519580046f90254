"""Tables and figures of the four papers as declared experiments, with the printed values beside ours."""
