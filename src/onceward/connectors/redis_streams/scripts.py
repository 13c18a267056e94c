"""What must happen atomically, as Lua that runs inside Redis. Works with Redis 6.2 and later.

Entry id, consumer and delivery count identify a delivery; a script touches a pending entry only while all three
are still the caller's. A lease is an idle time: an entry idle for `lease` or longer is free to be claimed. So
giving back is claiming with a large idle time, and a delay is claiming with one that is too small by the delay.

A hash keeps the failures as lines of JSON, by entry id: deliveries minus failures is how often an entry was lost.
"""

_BURY = """
local function bury(stream, group, history_key, dead_key, id, reason, category, error, deliveries)
    local entry = redis.call('XRANGE', stream, id, id)[1]
    local fields = entry and entry[2] or {}
    local named = {}
    for i = 1, #fields, 2 do named[fields[i]] = fields[i + 1] end
    local time = redis.call('TIME')
    local now = time[1] .. string.format('%03d', math.floor(time[2] / 1000))
    local history = redis.call('HGET', history_key, id) or ''
    if history ~= '' and (category == '' or error == '') then
        local last = cjson.decode(string.match(history, '([^\\n]+)\\n*$'))
        if category == '' then category = last.category or '' end
        if error == '' then error = last.error or '' end
    end
    redis.call('XADD', dead_key, '*', 'entry', id, 'id', named['id'] or '', 'body', named['body'] or '',
        'reason', reason, 'category', category, 'error', error, 'deliveries', deliveries,
        'enqueued_at', string.match(id, '^%d+'), 'died_at', now, 'history', history)
    redis.call('XACK', stream, group, id)
    redis.call('HDEL', history_key, id)
    return {id, reason, named['id'] or ''}
end
"""

CLAIM = (
    _BURY
    + """
local stream, history_key, dead_key = KEYS[1], KEYS[2], KEYS[3]
local group, consumer, lease = ARGV[1], ARGV[2], ARGV[3]
local count, suspect_after, max_deliveries = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local served, buried, alone, from = {}, {}, 0, '-'
repeat
    local pending = redis.call('XPENDING', stream, group, 'IDLE', lease, from, '+', count)
    for _, each in ipairs(pending) do
        local id, deliveries = each[1], each[4]
        from = '(' .. id
        local entry = redis.call('XRANGE', stream, id, id)[1]
        if not entry then
            table.insert(buried, bury(stream, group, history_key, dead_key, id, 'trimmed', '', '', deliveries))
        elseif deliveries >= max_deliveries then
            table.insert(buried, bury(stream, group, history_key, dead_key, id, 'max_deliveries', '', '', deliveries))
        else
            local _, failures = string.gsub(redis.call('HGET', history_key, id) or '', '\\n', '')
            local suspect = deliveries - failures >= suspect_after
            if suspect and #served > 0 then return {served, buried, alone} end
            redis.call('XCLAIM', stream, group, consumer, 0, id, 'IDLE', 0, 'RETRYCOUNT', deliveries + 1, 'JUSTID')
            table.insert(served, {id, deliveries + 1, entry[2]})
            if suspect then return {served, buried, 1} end
            if #served >= count then return {served, buried, alone} end
        end
    end
until #pending == 0
return {served, buried, alone}
"""
)
"""Take up to `count` entries whose lease has expired. Bury entries that cannot be delivered on the way."""

SETTLE = (
    _BURY
    + """
local stream, history_key, dead_key = KEYS[1], KEYS[2], KEYS[3]
local group, consumer, parked, lease = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local lost, done, held = {}, {}, {}
local endings = cmsgpack.unpack(ARGV[5])
for _, each in ipairs(redis.call('XPENDING', stream, group, '-', '+', 1000000, consumer)) do
    held[each[1]] = each[4]
end
for _, each in ipairs(endings) do
    local id, deliveries, verdict = each[1], each[2], each[3]
    if held[id] ~= deliveries then
        table.insert(lost, id)
    elseif verdict == 'done' then
        table.insert(done, id)
        if deliveries > 1 then redis.call('HDEL', history_key, id) end
    elseif verdict == 'extend' then
        redis.call('XCLAIM', stream, group, consumer, 0, id, 'IDLE', 0, 'RETRYCOUNT', deliveries, 'JUSTID')
    elseif verdict == 'return' then
        local idle = math.max(lease - each[4], 0)
        redis.call('XCLAIM', stream, group, parked, 0, id, 'IDLE', idle, 'RETRYCOUNT', deliveries - 1, 'JUSTID')
    elseif verdict == 'delay' then
        local history = redis.call('HGET', history_key, id) or ''
        redis.call('HSET', history_key, id, history .. each[6] .. '\\n')
        local idle = math.max(lease - each[4], 0)
        redis.call('XCLAIM', stream, group, parked, 0, id, 'IDLE', idle, 'RETRYCOUNT', deliveries, 'JUSTID')
    else
        if each[6] ~= '' then
            local history = redis.call('HGET', history_key, id) or ''
            redis.call('HSET', history_key, id, history .. each[6] .. '\\n')
        end
        bury(stream, group, history_key, dead_key, id, each[4], '', each[5], deliveries)
    end
end
for i = 1, #done, 1000 do
    redis.call('XACK', stream, group, unpack(done, i, math.min(i + 999, #done)))
end
return lost
"""
)
"""End or extend these deliveries. Each is a list: id, deliveries, verdict, and what the verdict needs: a delay in
milliseconds or a reason, an error, a line of history. Returns the ids that were no longer held.

They come as one MessagePack argument: packing hundreds of arguments costs a client more than the work here."""

ADD = """
for _, each in ipairs(cmsgpack.unpack(ARGV[2])) do
    if ARGV[1] == '' then
        redis.call('XADD', KEYS[1], '*', 'id', each[1], 'body', each[2])
    else
        redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], '*', 'id', each[1], 'body', each[2])
    end
end
"""
"""Append these, each an id and a body. Redis does not interrupt a script, so it appends all or none."""

RELEASE = """
local stream = KEYS[1]
local group, owner, parked, lease = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local consumers, released = redis.pcall('XINFO', 'CONSUMERS', stream, group), 0
if consumers.err then return 0 end
for _, each in ipairs(consumers) do
    local name, left = each[2], false
    if string.sub(name, 1, -14) == owner then
        for _, entry in ipairs(redis.call('XPENDING', stream, group, '-', '+', 1000000, name)) do
            if redis.call('XRANGE', stream, entry[1], entry[1])[1] then
                local id, deliveries = entry[1], entry[4]
                redis.call('XCLAIM', stream, group, parked, 0, id, 'IDLE', lease, 'RETRYCOUNT', deliveries, 'JUSTID')
                released = released + 1
            else
                left = true
            end
        end
        if not left then redis.call('XGROUP', 'DELCONSUMER', stream, group, name) end
    end
end
return released
"""
"""Free the entries of all consumers of an owner (its name and 13 characters); their deliveries count as lost. Trimmed
ones stay until their lease expires and they become dead letters: Redis 7 forgets an entry that is claimed after it was
trimmed."""
