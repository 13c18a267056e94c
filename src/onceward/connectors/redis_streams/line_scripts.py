"""Lines of a stream, as Lua that runs inside Redis: how a group delivers only the first entry of each key.

    next entries of the stream ──TAKE──► first of its line: leased
                                    └──► behind others: pending, held by `waiting`, which is nobody

The key is in the body, which only the consumer reads. So it reads entries that are not yet delivered, and tells `TAKE`
their keys; `TAKE` delivers those, as far as they are next, and lines them up. Redis does not interrupt a script, so no
entry is delivered without its place, and a place in line is the place in the stream. Whatever ends an entry, in any
process, lets the next of its line go in the same script. Beside the stream are

    lines    a sorted set of places: a line, the entry's id with zeros, so ids sort as texts, and the id as it is
    places   a hash of entries that are or were first, with their places
    holders  a hash of entries that are dead letters here and hold their line, with the letter and the place
    next     a list of entries that were let go; a fetch takes from it what still waits

A line is the length of its key, the key, and a colon each, so no line is the beginning of another. That of an entry
without a key is empty, and nobody waits in it. A key with many entries makes every set larger that all of them are in,
and what is larger is slower; so the hash has only those that can end. Most of what these
scripts take is for making strings. So the consumer makes places, and scripts cut ids and lines out of them.

What waits and was never delivered looks idle for ages, so XCLAIM can take just those.
"""

from __future__ import annotations

from functools import cache

from onceward.connectors.redis_streams.scripts import IDLE, POSITION, SERVE_FREE

_LINES = """
local lines, places, holders, next_ones = KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local function in_line(line, most)
    return redis.call('ZRANGEBYLEX', lines, '[' .. line, '(' .. line .. ':', 'LIMIT', 0, most)
end
local function line_in(place, id) return string.sub(place, 1, -42 - #id) end
local function entry_in(place, line) return string.sub(place, #line + 42) end
local function is_first(id)
    local place = redis.call('HGET', places, id)
    local line = place and line_in(place, id)
    return line == '' or (line and in_line(line, 1)[1] == place)
end
local function advance(left)
    local first, named = {}, {}
    for _, line in ipairs(left) do
        local place = line ~= '' and in_line(line, 1)[1]
        if place then
            local id = entry_in(place, line)
            first[#first + 1], named[#named + 1], named[#named + 2] = id, id, place
        end
    end
    if #first > 0 then
        redis.call('HSET', places, unpack(named))
        redis.call('RPUSH', next_ones, unpack(first))
    end
end
local function leave(ids, first)
    for i = first, #ids, 1000 do
        local last, left, gone = math.min(i + 999, #ids), {}, {}
        local found = redis.call('HMGET', places, unpack(ids, i, last))
        redis.call('HDEL', places, unpack(ids, i, last))
        for at = i, last do
            local place = found[at - i + 1]
            if place then
                left[#left + 1] = line_in(place, ids[at])
                gone[#gone + 1] = place
            end
        end
        if #gone > 0 then redis.call('ZREM', lines, unpack(gone)) end
        advance(left)
    end
end
local function park(stream, group, id, deliveries)
    local place = redis.call('HGET', places, id)
    if place then
        redis.call('XCLAIM', stream, group, 'waiting', 0, id, 'IDLE', 0, 'RETRYCOUNT', deliveries, 'JUSTID')
        advance({line_in(place, id)})
    end
end
local function hold(id, letter)
    local place = HOLDS and redis.call('HGET', places, id)
    if place and line_in(place, id) ~= '' then
        redis.call('HDEL', places, id)
        redis.call('HSET', holders, id, letter .. ' ' .. place)
    end
end
local function release(id)
    local held = redis.call('HGET', holders, id)
    if held then
        local place = string.match(held, '^%d+.%d+ (.*)$')
        redis.call('HDEL', holders, id)
        redis.call('ZREM', lines, place)
        advance({line_in(place, id)})
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
    + SERVE_FREE
    + """
local LONG, NEVER, ZEROS = string.rep(' ', 65), string.rep('9', 20) .. '-0', string.rep('0', 20)
local recover, is_fixed, after = tonumber(ARGV[9]), ARGV[10] == '1', ARGV[11]
local known, known_lines, known_places = unpack(cmsgpack.unpack(ARGV[12]))
local fresh, last = {}, position(stream, group)
if not last then return redis.error_reply('NOGROUP there is no group ' .. group .. ' of stream ' .. stream) end

local function with_zeros(id)
    local dash = string.find(id, '-', 1, true)
    return string.sub(ZEROS, dash) .. string.sub(id, 1, dash) .. string.sub(ZEROS, #id - dash + 1)
        .. string.sub(id, dash + 1)
end

local function claim(name, least_idle, idle, deliveries, ids)
    if #ids == 0 then return {} end
    for _, each in ipairs({'IDLE', idle, 'RETRYCOUNT', deliveries, 'JUSTID'}) do ids[#ids + 1] = each end
    return redis.call('XCLAIM', stream, group, name, least_idle, unpack(ids))
end

local complete_time, complete_number
local function is_there(id)
    if not complete_time then
        local facts, first, deleted = redis.pcall('XINFO', 'STREAM', stream), nil, nil
        for i = 1, #facts, 2 do
            if facts[i] == 'first-entry' then first = facts[i + 1] and facts[i + 1][1] end
            if facts[i] == 'max-deleted-entry-id' then deleted = facts[i + 1] end
        end
        local is_known = first and deleted
        local after = is_known and (with_zeros(first) > with_zeros(deleted) and first or deleted) or NEVER
        complete_time, complete_number = numbers_in(after)
    end
    local time, number = numbers_in(id)
    return time > complete_time or (time == complete_time and number > complete_number)
        or redis.call('XRANGE', stream, id, id)[1]
end

local function take_again(id)
    local pending = redis.call('XPENDING', stream, group, id, id, 1)[1]
    if pending and pending[2] == 'waiting' then return serve(pending, count, true) end
    if not pending and redis.call('HEXISTS', holders, id) == 0 then leave({id}, 1) end
end

local function take_next()
    local full
    repeat
        local most = #served == 0 and 1 or math.min(count - #served, 1000)
        local ids, waiting, is_taken, left = redis.call('LRANGE', next_ones, 0, most - 1), {}, {}, {}
        for _, id in ipairs(suspect_after > 0 and ids or {}) do
            if is_there(id) then waiting[#waiting + 1] = id end
        end
        for _, id in ipairs(claim(consumer, AGES, 0, 1, waiting)) do
            served[#served + 1], is_taken[id] = id, true
        end
        for _, id in ipairs(ids) do
            if not is_taken[id] then full = full or take_again(id) end
            if full == 'later' and not is_taken[id] then table.insert(left, 1, id) end
            is_taken[id] = true
        end
        redis.call('LTRIM', next_ones, #ids, -1)
        if #left > 0 then redis.call('LPUSH', next_ones, unpack(left)) end
    until full or #served >= count or #ids == 0
    return full
end

local function take_new(last)
    local from = 1
    if last ~= after then
        local at = with_zeros(last)
        if at < with_zeros(after) then return last end
        while from <= #known and with_zeros(known[from]) <= at do from = from + 1 end
    end
    local upto, free, is_free, is_taken = from - 1, 0, {}, {}
    while upto < #known and #served + free < count do
        upto = upto + 1
        local line = known_lines[upto]
        local first = line ~= '' and not is_taken[line] and in_line(line, 1)[1]
        is_free[upto] = line == '' or not (is_taken[line] or first) or first == known_places[upto]
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
            claim('waiting', 0, AGES, 0, ids)
            return taken[#taken][1], 1
        end
        redis.call('XACK', stream, group, unpack(ids))
        return last
    end
    local named, placed, behind = {}, {}, {}
    for i = from, upto do
        local id, place = known[i], known_places[i]
        placed[#placed + 1], placed[#placed + 2] = 0, place
        if is_free[i] then
            fresh[#fresh + 1], named[#named + 1], named[#named + 2] = id, id, place
        else
            behind[#behind + 1] = id
        end
    end
    if #named > 0 then
        local is_new = redis.call('HLEN', places) == 0
        if is_new then redis.call('HSET', places, 'long', LONG) end
        redis.call('HSET', places, unpack(named))
        if is_new then redis.call('HDEL', places, 'long') end
    end
    redis.call('ZADD', lines, unpack(placed))
    claim('waiting', 0, AGES, 0, behind)
    return known[upto]
end

if recover > 0 then
    local pending, dead = redis.call('XPENDING', stream, group)[1], redis.call('XLEN', dead_key)
    local held = redis.call('HLEN', holders)
    local is_whole = pending + held == redis.call('ZCARD', lines) and held <= dead
    if not is_whole and not is_fixed then return {served, buried, 0, fresh, last, 1} end
    if serve_free(recover, 'waiting') == 'alone' then return {served, buried, 1, fresh, last, 0} end
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
lists of their ids, lines and places. If some were removed since, none is taken: the group goes back to where it was,
or if this user may not do that, the entries wait until their lines are fixed. One that has its place already was
delivered by a group that somebody deleted. Redis keeps a small hash as a list, and searches it from its beginning for
each entry; one long value makes it a table.

`is_there`: nothing is missing after the first entry and the last one that was removed by its id, which Redis 6 does
not tell. A body would become a value of Lua, and then a reply, so the next entry of a line is returned as its id: the
process that has lined it up knows it, and others read it. It may be on the list twice. If nothing else was
served, the first of the list is taken on its own: one that must be alone would always find others served before it.

Returns the entries to deliver, what was buried, whether the first must be alone, the new ones to deliver, the last
entry that is delivered, and 1 if the lines do not match what is pending; unless `is_fixed`, nothing is taken before
they do."""

NEXT_TURN = (
    POSITION
    + IDLE
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
            local left = left_of(each, lease)
            if due < 0 or left < due then due = left end
        end
        if #pending == most then due = math.min(due, 1000) end
    end
end
return {after, due}
"""
)
"""As `NEXT_DUE`, without those that wait in line. While there are any, it says half a second at most: another process
may release one and be too busy, or stop, before it takes it."""

PASS = """
local stream, group, dead_key = KEYS[1], ARGV[1], KEYS[3]
for at = 2, #ARGV, 2 do
    local id, place = ARGV[at], ARGV[at + 1]
    local held = redis.call('HGET', holders, id)
    local letter = held and string.match(held, '^%d+.%d+')
    if letter and not redis.call('XRANGE', dead_key, letter, letter)[1] then release(id) end
    local is_gone = not held and not redis.call('XPENDING', stream, group, id, id, 1)[1]
    if is_gone then
        redis.call('HSET', places, id, place)
        leave({id}, 1)
    end
end
"""
"""Take those of these entries out of their lines, each with its place, that others have acknowledged, or whose letters
others removed."""

LINE_UP = """
local stream, group = KEYS[1], ARGV[1]
for _, each in ipairs(cmsgpack.unpack(ARGV[2])) do
    local id, line, place = each[1], each[2], each[3]
    local is_new = not redis.call('ZSCORE', lines, place)
    if is_new and redis.call('XPENDING', stream, group, id, id, 1)[1] then
        local first = line ~= '' and in_line(line, 1)[1]
        redis.call('HSET', places, id, place)
        redis.call('ZADD', lines, 0, place)
        if first and in_line(line, 1)[1] == place then
            redis.call('LREM', next_ones, 0, entry_in(first, line))
        end
        advance({line})
    end
end
"""
"""Line up pending entries that others have taken without order, each with its line and its place."""

BEHIND = """
local stream, most, found = KEYS[1], tonumber(ARGV[1]), {}
for _, line in ipairs(cmsgpack.unpack(ARGV[2])) do
    local waiting = redis.call('ZLEXCOUNT', lines, '[' .. line, '(' .. line .. ':')
    local entries = {}
    for _, place in ipairs(in_line(line, most)) do
        local id = entry_in(place, line)
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
