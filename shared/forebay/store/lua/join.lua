-- Makes a cursor on the batches that begins at the start of what is kept; one that exists stays where it is.
-- uses _batches
-- ARGV: cursor, consumer, 1 if it follows. Returns the driver where the consumer cannot be what it asks to be, else ''.
local driver = enter(ARGV[2], ARGV[3] == '1')
if driver then return driver end
redis.pcall('XGROUP', 'CREATE', BATCHES, ARGV[1], '0', 'MKSTREAM') -- an error: it exists
return ''
