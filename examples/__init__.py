"""Programs that use smq as its users do. Only their tests import them."""
