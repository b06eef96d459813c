"""The way of a record from send() to its acknowledgement; `smq.clients.producer` is what users see."""
