"""Drop-ins for modules of other libraries; none of them is needed to import these."""
