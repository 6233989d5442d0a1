"""Other back ends than torch's: our kernels one by one, and the megakernel."""
