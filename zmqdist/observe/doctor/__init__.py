"""What is wrong, and what to do: the checks behind `zmqdist doctor`."""
