"""Memory, communication and time of a step, from the compiler, without the device."""
