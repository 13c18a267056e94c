"""What must happen atomically, as Lua that runs inside Redis. Works with Redis 6.2 and later.

Entry id, consumer and delivery count identify a delivery; a script touches a pending entry only while all three
are still the caller's. A lease is an idle time: an entry idle for `lease` or longer is free to be claimed. What
is given back, or waits for its next delivery, is held by `delayed`, which is nobody. It is free once it is idle for
ages, more than three years: so a delay is claiming it with an idle time that is too small by the delay.

A hash keeps the failures as lines of JSON, by entry id: deliveries minus failures is how often an entry was lost.

Another hash, the tally, keeps what Redis forgets when entries are removed, so `onceward balance` sees it:

    appended      entries that our sinks have added
    streams       how often the stream was deleted and created again
    before        `appended` when that last happened
    counts        1 if Redis counts what is added to a stream (since 7.0), so it knows what others have added
    last, others  otherwise: our last entry, and 1 if others have added entries, too
    ended:GROUP   entries that the group has acknowledged; only if they were counted from the first one on
    begun:GROUP   `streams` when the group was created

What follows `-- in lines:` runs only in groups that keep order: see `line_scripts`.
"""

POSITION = """
local function is_denied(reply)
    return reply.err and (string.find(reply.err, 'permission') or string.find(reply.err, "can't run this command"))
end
local function position(stream, group)
    local groups, found = redis.pcall('XINFO', 'GROUPS', stream), nil
    if groups.err then return nil, 0, is_denied(groups) end
    for _, each in ipairs(groups) do
        if each[2] == group then
            for i = 1, #each, 2 do
                if each[i] == 'last-delivered-id' then found = each[i + 1] end
            end
        end
    end
    return found, #groups
end
"""
"""Returns the last entry that the group has delivered, nil if there is no group, how many groups there are, and true
if this user may not know."""

DELAYED = "delayed"
"""The consumer that holds the entries that are given back, or wait for their next delivery."""
AGES = 100_000_000_000
"""Milliseconds, as in the scripts."""

IDLE = """
local AGES = 100000000000
local function least_idle(name, lease) return name == 'delayed' and AGES or lease end
local function left_of(pending, lease)
    local name, idle = pending[2], pending[3]
    if name ~= 'delayed' and idle >= AGES then idle = idle - AGES end
    return math.max(least_idle(name, lease) - idle, 0)
end
local function delay(stream, group, id, milliseconds, deliveries)
    local idle = math.max(AGES - milliseconds, 0)
    redis.call('XCLAIM', stream, group, 'delayed', 0, id, 'IDLE', idle, 'RETRYCOUNT', deliveries, 'JUSTID')
end
"""
"""`left_of`: the milliseconds until a pending entry is free to be claimed. What waits in line looks as if nobody had
touched it for ages longer. `delay`: nobody has it, and it is free after that time."""

_COUNT_ENDED = """
local function end_entries(stream, group, tally, ids, first)
    local ended = 0
    for i = first, #ids, 1000 do
        ended = ended + redis.call('XACK', stream, group, unpack(ids, i, math.min(i + 999, #ids)))
    end
    -- in lines: leave(ids, first)
    if ended > 0 and redis.call('HEXISTS', tally, 'ended:' .. group) == 1 then
        redis.call('HINCRBY', tally, 'ended:' .. group, ended)
    end
end
"""

_APPENDED = """
local function facts_of(stream)
    local reply = redis.pcall('XINFO', 'STREAM', stream)
    if reply.err then return nil end
    local facts = {}
    for i = 1, #reply, 2 do facts[reply[i]] = reply[i + 1] end
    return facts
end
local function note_new_stream(tally)
    local appended = redis.call('HGET', tally, 'appended')
    if appended then
        redis.call('HINCRBY', tally, 'streams', 1)
        redis.call('HSET', tally, 'before', appended)
    end
end
local function count_appended(tally, facts)
    local appended, before, last, others = unpack(redis.call('HMGET', tally, 'appended', 'before', 'last', 'others'))
    appended, before = tonumber(appended or 0), tonumber(before or 0)
    local added, ours = facts['entries-added'], appended - before
    if added == 0 then return appended end
    if added then return added >= ours and appended + added - ours or nil end
    local is_ours = facts['last-generated-id'] == '0-0' or facts['last-generated-id'] == last
    return is_ours and not others and appended or nil
end
"""
"""`count_appended`: by us and by others; nil if unknown, as after others have created the stream again."""

MAKE_GROUP = (
    POSITION
    + _APPENDED
    + """
local stream, tally, moved, group = KEYS[1], KEYS[4], KEYS[5], ARGV[1]
local at, groups, is_hidden = position(stream, group)
if is_hidden then
    return redis.error_reply('NOPERM this user may not look up groups; it needs XINFO for stream ' .. stream)
end
local is_new = not at
if is_new then
    if redis.call('EXISTS', stream) == 0 then note_new_stream(tally) end
    local made = redis.pcall('XGROUP', 'CREATE', stream, group, '0', 'MKSTREAM')
    if is_denied(made) then
        return redis.error_reply('NOPERM this user may not create the group ' .. group .. ' of stream ' .. stream)
    end
    if made.err then return made end
    redis.call('DEL', moved)
    groups = groups + 1
end
local streams, begun, ended = unpack(redis.call('HMGET', tally, 'streams', 'begun:' .. group, 'ended:' .. group))
streams = streams or '0'
if not is_new and (begun or at ~= '0-0') then return 0 end
redis.call('HSET', tally, 'begun:' .. group, streams)
if begun and begun ~= streams and ended then return is_new and 1 or 0 end
local is_first = not begun and groups == 1 and streams == '0'
if is_first or count_appended(tally, facts_of(stream)) == redis.call('XLEN', stream) then
    redis.call('HSET', tally, 'ended:' .. group, 0)
else
    redis.call('HDEL', tally, 'ended:' .. group)
end
return is_new and 1 or 0
"""
)
"""Create the stream and its group, if they do not exist; return whether the group is new.

What it ends is counted if it gets every entry that was ever appended: it is the first group, or no entry was removed.
If the stream was deleted, the count goes on; if only the group was, entries would be counted twice."""

ACKNOWLEDGE = (
    _COUNT_ENDED
    + """
end_entries(KEYS[1], ARGV[1], KEYS[4], ARGV, 2)
"""
)

_BURY = (
    _COUNT_ENDED
    + """
local function bury(stream, group, history_key, dead_key, tally, id, reason, category, error, deliveries)
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
    local letter = redis.call('XADD', dead_key, '*', 'entry', id, 'id', named['id'] or '', 'body', named['body'] or '',
        'reason', reason, 'category', category, 'error', error, 'deliveries', deliveries,
        'enqueued_at', string.match(id, '^%d+'), 'died_at', now, 'history', history)
    -- in lines: hold(id, letter)
    end_entries(stream, group, tally, {id}, 1)
    redis.call('HDEL', history_key, id)
    return {id, reason, named['id'] or ''}
end
"""
)

SERVE = (
    _BURY
    + """
local stream, history_key, dead_key, tally = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local group, consumer, lease = ARGV[1], ARGV[2], tonumber(ARGV[3])
local count, suspect_after, max_deliveries = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local most_lost, counts_lost = tonumber(ARGV[7]), ARGV[8] == '1'
local served, buried = {}, {}
local function serve(each, most, is_next)
    local id, deliveries = each[1], each[4]
    local entry = redis.call('XRANGE', stream, id, id)[1]
    local history = deliveries > 0 and redis.call('HGET', history_key, id) or ''
    local _, failures = string.gsub(history, '\\n', '')
    local lost = deliveries - failures
    local counted = counts_lost and deliveries or failures
    local exhausted = counted >= max_deliveries or lost >= most_lost
    if not entry then
        table.insert(
            buried, bury(stream, group, history_key, dead_key, tally, id, 'trimmed', '', '', deliveries))
    elseif exhausted then
        table.insert(
            buried, bury(stream, group, history_key, dead_key, tally, id, 'max_deliveries', '', '', deliveries))
    -- in lines: elseif not is_next and not is_first(id) then park(stream, group, id, deliveries)
    else
        local suspect = lost >= suspect_after
        if suspect and #served > 0 then return 'later' end
        redis.call('XCLAIM', stream, group, consumer, 0, id, 'IDLE', 0, 'RETRYCOUNT', deliveries + 1, 'JUSTID')
        table.insert(served, {id, deliveries + 1, entry[2], lost})
        if suspect then return 'alone' end
        if #served >= most then return 'full' end
    end
end
"""
)
"""`serve`: take a pending entry, or bury it if it cannot be delivered. Returns why no more can be taken, if so."""

SERVE_FREE = (
    SERVE
    + IDLE
    + """
local function numbers_in(id)
    local time, number = string.match(id, '^(%d+)-(%d+)$')
    return tonumber(time), tonumber(number)
end
local function is_older(one, other)
    local time, number = numbers_in(one[1])
    local other_time, other_number = numbers_in(other[1])
    return time < other_time or (time == other_time and number < other_number)
end
local function serve_free(most, passed_over)
    local from, found = {}, nil
    repeat
        found = {}
        local holders = redis.call('XPENDING', stream, group)[4] or {}
        local share = math.floor(most / math.max(#holders, 1)) + 1
        for _, holder in ipairs(holders) do
            local name = holder[1]
            local idle, first = least_idle(name, lease), from[name] or '-'
            local page = name ~= passed_over
                and redis.call('XPENDING', stream, group, 'IDLE', idle, first, '+', share, name) or {}
            for _, each in ipairs(page) do
                from[name] = '(' .. each[1]
                found[#found + 1] = each
            end
        end
        table.sort(found, is_older)
        for _, each in ipairs(found) do
            local full = left_of(each, lease) == 0 and serve(each, most)
            if full then return full end
        end
    until #found == 0
end
"""
)
"""`serve_free`: `serve` entries whose lease or delay is over, except those of one consumer. It asks for each consumer,
since Redis can pass over what is not free only by one idle time. Of each it takes a share, and the oldest first."""

CLAIM = (
    SERVE_FREE
    + """
local full = serve_free(count)
return {served, buried, full == 'alone' and 1 or 0}
"""
)
"""Take up to `count` entries whose lease or delay is over. Bury entries that cannot be delivered on the way."""

SETTLE = (
    _BURY
    + IDLE
    + """
local stream, history_key, dead_key, tally = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local group, consumer = ARGV[1], ARGV[2]
local lost, buried, done, held = {}, {}, {}, {}
local endings = cmsgpack.unpack(ARGV[3])
for _, each in ipairs(redis.call('XPENDING', stream, group, '-', '+', 1000000, consumer)) do
    held[each[1]] = each[4]
end
local function note(id, line)
    if (line or '') ~= '' then
        redis.call('HSET', history_key, id, (redis.call('HGET', history_key, id) or '') .. line .. '\\n')
    end
end
for _, each in ipairs(endings) do
    local id, deliveries, verdict = each[1], each[2], each[3]
    if held[id] ~= deliveries then
        table.insert(lost, id)
    elseif verdict == 'done' then
        table.insert(done, id)
        if deliveries > 1 then redis.call('HDEL', history_key, id) end
    elseif verdict ~= 'bury' and not redis.call('XRANGE', stream, id, id)[1] then
        if verdict ~= 'extend' then
            note(id, each[6])
            table.insert(
                buried, bury(stream, group, history_key, dead_key, tally, id, 'trimmed', '', '', deliveries))
        end
    elseif verdict == 'extend' then
        redis.call('XCLAIM', stream, group, consumer, 0, id, 'IDLE', 0, 'RETRYCOUNT', deliveries, 'JUSTID')
    elseif verdict == 'return' then
        delay(stream, group, id, each[4], deliveries - 1)
    elseif verdict == 'delay' then
        note(id, each[6])
        delay(stream, group, id, each[4], deliveries)
    else
        note(id, each[6])
        bury(stream, group, history_key, dead_key, tally, id, each[4], '', each[5], deliveries)
    end
end
end_entries(stream, group, tally, done, 1)
return {lost, buried}
"""
)
"""End or extend these deliveries. Each is a list: id, deliveries, verdict, and what the verdict needs: a delay in
milliseconds or a reason, an error, a line of history. Returns the ids that were no longer held, and what was buried
because somebody had trimmed it. A trimmed entry is never claimed, because Redis 7 forgets it then: a worker that has it
may still end it until its lease is over, and after that it becomes a dead letter.

They come as one MessagePack argument: packing hundreds of arguments costs a client more than the work here."""

ADD = (
    """
local stream, tally = KEYS[1], KEYS[4]
local counts = redis.call('HGET', tally, 'counts')
if ARGV[3] and ARGV[1] == '' and counts == '1'
    and redis.call('XADD', stream, 'NOMKSTREAM', '*', 'id', ARGV[2], 'body', ARGV[3]) then
    redis.call('HINCRBY', tally, 'appended', 1)
    return
end
if counts ~= '1' or redis.call('EXISTS', stream) == 0 then
"""
    + _APPENDED
    + """
    if redis.call('EXISTS', stream) == 0 then
        note_new_stream(tally)
    else
        local facts = facts_of(stream) or {}
        counts = facts['entries-added'] and '1' or '0'
        redis.call('HSET', tally, 'counts', counts)
        if not count_appended(tally, facts) then redis.call('HSET', tally, 'others', 1) end
    end
end
local entries, last = ARGV[3] and {{ARGV[2], ARGV[3]}} or cmsgpack.unpack(ARGV[2]), nil
for _, each in ipairs(entries) do
    if ARGV[1] == '' then
        last = redis.call('XADD', stream, '*', 'id', each[1], 'body', each[2])
    else
        last = redis.call('XADD', stream, 'MAXLEN', '~', ARGV[1], '*', 'id', each[1], 'body', each[2])
    end
end
if #entries > 0 then redis.call('HINCRBY', tally, 'appended', #entries) end
if last and counts ~= '1' then redis.call('HSET', tally, 'last', last) end
"""
)
"""Append these, each an id and a body, and count them. Redis does not interrupt a script, so it appends all or none.
One comes as two arguments, several as one of MessagePack. One for a stream that exists needs the fewest commands, since
each takes nearly as long as the XADD. The functions are defined only where they are needed: that
takes as long as appending an entry."""

NEXT_DUE = (
    POSITION
    + IDLE
    + """
local stream, group, lease, most = KEYS[1], ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local after = position(stream, group)
if not after then return {'', 0} end
local pending, due = redis.call('XPENDING', stream, group, '-', '+', most), -1
for _, each in ipairs(pending) do
    local left = left_of(each, lease)
    if due < 0 or left < due then due = left end
end
if #pending == most then due = math.min(due, 1000) end
return {after, due}
"""
)
"""Return the last entry that the group has delivered, and the milliseconds until a pending entry is free to be claimed:
-1 if none is pending. Of many pending entries it looks at some, and says a second at most."""

FORGET_DEAD = """
local stream, dead_key, moved, group, is_moved = KEYS[1], KEYS[3], KEYS[5], ARGV[1], ARGV[2] == '1'
for at = 3, #ARGV do
    local letter = redis.call('XRANGE', dead_key, ARGV[at], ARGV[at])[1]
    if letter then
        redis.call('XDEL', dead_key, ARGV[at])
        for i = 1, #letter[2], 2 do
            if letter[2][i] == 'entry' then
                local entry = letter[2][i + 1]
                if is_moved then redis.call('ZADD', moved, string.match(entry, '^%d+'), entry) end
                -- in lines: release(entry)
            end
        end
    end
end
local first = redis.call('XRANGE', stream, '-', '+', 'COUNT', 1)[1]
if first then redis.call('ZREMRANGEBYSCORE', moved, '-inf', '(' .. string.match(first[1], '^%d+')) end
"""
"""Remove dead letters that were moved elsewhere or are done, and remember the entries of those that were moved as long
as the stream has them."""

HASTEN = (
    IDLE
    + """
local stream, group = KEYS[1], ARGV[1]
for at = 2, #ARGV do
    local id = ARGV[at]
    local is_there = redis.call('XRANGE', stream, id, id)[1]
    for _, entry in ipairs(is_there and redis.call('XPENDING', stream, group, id, id, 1, 'delayed') or {}) do
        delay(stream, group, id, 0, entry[4])
    end
end
return 0
"""
)
"""End the delays of entries that nobody holds. Trimmed ones stay: see `SETTLE`."""

RELEASE = (
    IDLE
    + """
local stream, group, owner = KEYS[1], ARGV[1], ARGV[2]
local consumers, released = redis.pcall('XINFO', 'CONSUMERS', stream, group), 0
if consumers.err then return 0 end
for _, each in ipairs(consumers) do
    local name, left = each[2], false
    if string.sub(name, 1, -14) == owner then
        for _, entry in ipairs(redis.call('XPENDING', stream, group, '-', '+', 1000000, name)) do
            if redis.call('XRANGE', stream, entry[1], entry[1])[1] then
                delay(stream, group, entry[1], 0, entry[4])
                released = released + 1
            else
                left = true
            end
        end
        if not left then redis.pcall('XGROUP', 'DELCONSUMER', stream, group, name) end
    end
end
return released
"""
)
"""Free the entries of all consumers of an owner (its name and 13 characters); their deliveries count as lost. Trimmed
ones stay: see `SETTLE`."""
