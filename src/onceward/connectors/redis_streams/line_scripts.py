"""Lines of a stream, as Lua that runs inside Redis: how a group delivers only the first entry of each key.

    next entries of the stream ──TAKE──► first of its line: leased
                                    └──► behind others: pending, held by `waiting`, which is nobody

The key is in the body, which only the consumer reads. So it reads entries that are not yet delivered, and tells `TAKE`
their keys; `TAKE` delivers those, as far as they are next, and lines them up. Redis does not interrupt a script, so no
entry is delivered without its place, and a place in line is the place in the stream. Whatever ends an entry, in any
process, lets the next of its line go in the same script. Beside the stream are

    lines    a sorted set of line and entry, by both; a line is the length of its key, the key, and a colon each
    keys     a hash of pending entries, with their lines; an entry without a key has an empty one
    holders  a hash of entries that are dead letters here and hold their line, with the letter and the line
    next     a list of entries that were let go; a fetch takes from it what still waits
"""

from __future__ import annotations

from functools import cache

from onceward.connectors.redis_streams.scripts import POSITION, SERVE

_LINES = """
local lines, line_of, holders, next_ones = KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local function place(id)
    local time, number = string.match(id, '^(%d+).(%d+)$')
    return string.sub('00000000000000000000' .. time, -20) .. '-' .. string.sub('00000000000000000000' .. number, -20)
end
local function members(line, most)
    return redis.call('ZRANGEBYLEX', lines, '[' .. line, '(' .. line .. ':', 'LIMIT', 0, most)
end
local function entry_of(member)
    local time, number = string.match(string.sub(member, -41), '^0*(%d+).0*(%d+)$')
    return time .. '-' .. number
end
local function first_of(line)
    local member = members(line, 1)[1]
    return member and entry_of(member)
end
local function is_first(id)
    local line = redis.call('HGET', line_of, id)
    return line == '' or (line and first_of(line) == id)
end
local function advance(left)
    local first = {}
    for _, line in ipairs(left) do table.insert(first, first_of(line)) end
    if #first > 0 then redis.call('RPUSH', next_ones, unpack(first)) end
end
local function leave(ids, first)
    for i = first, #ids, 1000 do
        local last, left, gone = math.min(i + 999, #ids), {}, {}
        local found = redis.call('HMGET', line_of, unpack(ids, i, last))
        redis.call('HDEL', line_of, unpack(ids, i, last))
        for at = i, last do
            local line = found[at - i + 1]
            if line and line ~= '' then
                table.insert(left, line)
                table.insert(gone, line .. place(ids[at]))
            end
        end
        if #gone > 0 then redis.call('ZREM', lines, unpack(gone)) end
        advance(left)
    end
end
local function park(stream, group, id, deliveries)
    local line = redis.call('HGET', line_of, id)
    if line then
        redis.call('XCLAIM', stream, group, 'waiting', 0, id, 'IDLE', 0, 'RETRYCOUNT', deliveries, 'JUSTID')
        advance({line})
    end
end
local function hold(id, letter)
    local line = HOLDS and redis.call('HGET', line_of, id)
    if line and line ~= '' then
        redis.call('HDEL', line_of, id)
        redis.call('HSET', holders, id, letter .. ' ' .. line)
    end
end
local function release(id)
    local held = redis.call('HGET', holders, id)
    if held then
        local line = string.match(held, '^%d+.%d+ (.*)$')
        redis.call('HDEL', holders, id)
        redis.call('ZREM', lines, line .. place(id))
        advance({line})
    end
end
"""
"""`leave`: entries are done; `hold`: one dies, and keeps its place; `release`: its letter is gone. `advance`: let the
first of these lines go. `park`: an entry that is not the first, because an older one was found, waits again."""


@cache
def in_lines(script: str, hold_dead: bool) -> str:
    """Return the script for a group that keeps order. With `hold_dead`, a dead letter is first until it is gone."""
    lines = _LINES.replace("HOLDS", "true" if hold_dead else "false")
    return lines + script.replace("-- in lines: ", "")


TAKE = (
    POSITION
    + SERVE
    + """
local LONG = string.rep(' ', 65)
local recover, is_fixed, after = tonumber(ARGV[9]), ARGV[10] == '1', ARGV[11]
local known, known_lines, known_places = unpack(cmsgpack.unpack(ARGV[12]))
local fresh, last = {}, position(stream, group)
if not last then return redis.error_reply('NOGROUP there is no group ' .. group .. ' of stream ' .. stream) end

local function take_due()
    for _, each in ipairs(redis.call('XPENDING', stream, group)[4] or {}) do
        local name, from = each[1], '-'
        if name ~= 'waiting' then
            repeat
                local pending = redis.call('XPENDING', stream, group, 'IDLE', lease, from, '+', recover, name)
                for _, due in ipairs(pending) do
                    from = '(' .. due[1]
                    local full = serve(due, recover)
                    if full then return full end
                end
            until #pending == 0
        end
    end
end

local function claim(name, deliveries, ids)
    if #ids > 0 then
        for _, option in ipairs({'IDLE', 0, 'RETRYCOUNT', deliveries, 'JUSTID'}) do table.insert(ids, option) end
        redis.call('XCLAIM', stream, group, name, 0, unpack(ids))
    end
end

local function take_next()
    local full
    repeat
        local most, used, first_time = math.min(count - #served, 1000), 0, {}
        local ids = redis.call('LRANGE', next_ones, 0, most - 1)
        for _, id in ipairs(ids) do
            if not full then
                local pending = redis.call('XPENDING', stream, group, id, id, 1)[1]
                local is_waiting = pending and pending[2] == 'waiting'
                local is_new = is_waiting and pending[4] == 0 and suspect_after > 0
                local entry = is_new and redis.call('XRANGE', stream, id, id)[1]
                if entry then
                    table.insert(first_time, id)
                    table.insert(served, {id, 1, entry[2], 0})
                    full = #served >= count and 'full' or nil
                elseif is_waiting then
                    full = serve(pending, count, true)
                elseif not pending and redis.call('HEXISTS', holders, id) == 0 then
                    leave({id}, 1)
                end
                if full ~= 'later' then used = used + 1 end
            end
        end
        claim(consumer, 1, first_time)
        redis.call('LTRIM', next_ones, used, -1)
    until full or #ids == 0
    return full
end

local function take_new(last)
    local from = 1
    if last ~= after then
        local at = place(last)
        if at < place(after) then return last end
        while from <= #known and known_places[from] <= at do from = from + 1 end
    end
    local upto, free, is_free, is_taken = from - 1, 0, {}, {}
    while upto < #known and #served + free < count do
        upto = upto + 1
        local line = known_lines[upto]
        local first = line ~= '' and not is_taken[line] and members(line, 1)[1]
        is_free[upto] = line == '' or not (is_taken[line] or first) or first == line .. known_places[upto]
        if is_free[upto] then free = free + 1 end
        is_taken[line] = true
    end
    if upto < from then return last end
    local many = upto - from + 1
    local reply = redis.call('XREADGROUP', 'GROUP', group, consumer, 'COUNT', many, 'STREAMS', stream, '>')
    local taken, is_planned = reply and reply[1][2] or {}, true
    for i = 1, many do is_planned = is_planned and taken[i] and taken[i][1] == known[from + i - 1] end
    if not is_planned then
        local ids = {}
        for _, each in ipairs(taken) do table.insert(ids, each[1]) end
        if #ids == 0 then return last end
        local moved = redis.pcall('XGROUP', 'SETID', stream, group, last)
        if moved.err then
            claim('waiting', 0, ids)
            return taken[#taken][1], 1
        end
        redis.call('XACK', stream, group, unpack(ids))
        return last
    end
    local named, placed, behind = {}, {}, {}
    for i = from, upto do
        local id, line = known[i], known_lines[i]
        named[#named + 1] = id
        named[#named + 1] = line
        if line ~= '' then
            placed[#placed + 1] = 0
            placed[#placed + 1] = line .. known_places[i]
        end
        if is_free[i] then fresh[#fresh + 1] = id else behind[#behind + 1] = id end
    end
    local is_new = redis.call('HLEN', line_of) == 0
    if is_new then redis.call('HSET', line_of, 'long', LONG) end
    redis.call('HSET', line_of, unpack(named))
    if is_new then redis.call('HDEL', line_of, 'long') end
    if #placed > 0 then redis.call('ZADD', lines, unpack(placed)) end
    claim('waiting', 0, behind)
    return known[upto]
end

if recover > 0 then
    local pending, dead = redis.call('XPENDING', stream, group)[1], redis.call('XLEN', dead_key)
    local is_whole = pending == redis.call('HLEN', line_of) and redis.call('HLEN', holders) <= dead
    if not is_whole and not is_fixed then return {served, buried, 0, fresh, last, 1} end
    if take_due() == 'alone' then return {served, buried, 1, fresh, last, 0} end
end
if recover >= 0 and #served < count and take_next() == 'alone' then
    return {served, buried, 1, fresh, last, 0}
end
local differs
last, differs = take_new(last)
return {served, buried, 0, fresh, last, differs or 0}
"""
)
"""Take up to `count` first entries of their lines: up to `recover` whose lease or delay is over, then those that were
let go (unless it is negative), then new ones. These are the entries after `after`, as far as they are `known`: three
lists of their ids, lines and places. If some were removed since, none is taken: the group goes back to where it was, or
if this user may not do that, the entries wait until their lines are fixed. One that has its place already was delivered
by a group that somebody deleted. Redis keeps a small hash as a list, and searches it from its beginning for each entry;
one long value makes it a table.

Returns the entries to deliver, what was buried, whether the first must be alone, the new ones to deliver, the last
entry that is delivered, and 1 if the lines do not match what is pending; unless `is_fixed`, nothing is taken before
they do."""

NEXT_TURN = (
    POSITION
    + """
local stream, group, lease, most = KEYS[1], ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local after, due = position(stream, group), -1
if not after then return {'', 0} end
if redis.call('LLEN', next_ones) > 0 then return {after, 0} end
for _, holder in ipairs(redis.call('XPENDING', stream, group)[4] or {}) do
    if holder[1] == 'waiting' then
        due = due < 0 and 500 or math.min(due, 500)
    else
        local pending = redis.call('XPENDING', stream, group, '-', '+', most, holder[1])
        for _, each in ipairs(pending) do
            local left = math.max(lease - each[3], 0)
            if due < 0 or left < due then due = left end
        end
        if #pending == most then due = math.min(due, 1000) end
    end
end
return {after, due}
"""
)
"""As `NEXT_DUE`, without those that wait in line. While there are any, it says half a second at most: another process
may let one go and be too busy, or stop, before it takes it."""

PASS = """
local stream, group, dead_key = KEYS[1], ARGV[1], KEYS[3]
for at = 2, #ARGV do
    local id = ARGV[at]
    local held = redis.call('HGET', holders, id)
    local letter = held and string.match(held, '^%d+.%d+')
    if letter and not redis.call('XRANGE', dead_key, letter, letter)[1] then release(id) end
    local is_gone = not held and not redis.call('XPENDING', stream, group, id, id, 1)[1]
    if is_gone then leave({id}, 1) end
end
"""
"""Take those of these entries out of their lines that others have acknowledged, or whose letters others removed."""

LINE_UP = """
local stream, group = KEYS[1], ARGV[1]
for _, each in ipairs(cmsgpack.unpack(ARGV[2])) do
    local id, line = each[1], each[2]
    local is_new = redis.call('HEXISTS', line_of, id) == 0
    if is_new and redis.call('XPENDING', stream, group, id, id, 1)[1] then
        redis.call('HSET', line_of, id, line)
        if line ~= '' then
            local first = first_of(line)
            redis.call('ZADD', lines, 0, line .. place(id))
            if first and first_of(line) == id then redis.call('LREM', next_ones, 0, first) end
            advance({line})
        end
    end
end
"""
"""Line up pending entries that others have taken without order, each with its line."""

BEHIND = """
local stream, most, found = KEYS[1], tonumber(ARGV[1]), {}
for _, line in ipairs(cmsgpack.unpack(ARGV[2])) do
    local waiting = redis.call('ZLEXCOUNT', lines, '[' .. line, '(' .. line .. ':')
    local entries = {}
    for _, member in ipairs(members(line, most)) do
        local id = entry_of(member)
        if redis.call('HEXISTS', holders, id) == 1 then
            waiting = waiting - 1
        else
            local entry = redis.call('XRANGE', stream, id, id)[1]
            table.insert(entries, entry and entry[2] or {})
        end
    end
    table.insert(found, {waiting, entries})
end
return found
"""
"""Count what is in these lines and is not dead, and return the first entries of each."""
