-- The trainer has stepped. ARGV: version. Returns {'ok', version} or {'backwards', current}.
local current, version = number('version', 0), tonumber(ARGV[1])
if version < current then return {'backwards', tostring(current)} end
local trained = (version - current) * number('k', 1) * number('B', 1)
call('HSET', STATE, 'version', version, 'ahead', math.max(0, number('ahead', 0) - trained))
wake('admission')
wake('cutter')
return {'ok', tostring(version)}
