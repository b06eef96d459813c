"""Commands of `smq group` that do more than print one answer: lag, and changes of committed offsets."""
