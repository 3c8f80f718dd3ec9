"""How parts of the model are computed: backends of attention, and gradients written by hand."""
