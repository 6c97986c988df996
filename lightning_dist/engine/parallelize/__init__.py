"""All parallelisms put on one module, in an order that is the specification."""
