"""Programs that use smq as its users do. Nothing imports them but their tests."""
