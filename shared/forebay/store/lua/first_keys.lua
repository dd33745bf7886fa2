-- The key set of the first tensor result of a workflow in the run. ARGV: workflow, the key set of this one.
call('HSETNX', key('first_keys'), ARGV[1], ARGV[2])
return call('HGET', key('first_keys'), ARGV[1])
