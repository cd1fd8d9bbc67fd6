"""Native code for the CPU: C++ sources, built when the package is installed, and the one place that calls into them."""
