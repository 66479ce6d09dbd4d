-- Finds the shard of a session: the same arithmetic as src/rose/core/shard_placement.py, which a test compares with it.
--
--   var(txn.session),lua.shard_of(SHARDS)    the number of the shard
--   var(txn.session),lua.group_of            the group in the name of a session

local crc_table = {}
for byte = 0, 255 do
    local value = byte
    for _ = 1, 8 do
        value = (value & 1 == 1) and ((value >> 1) ~ 0xEDB88320) or (value >> 1)
    end
    crc_table[byte] = value
end

local function crc32(text)
    local value = 0xFFFFFFFF
    for position = 1, #text do
        value = (value >> 8) ~ crc_table[(value ~ text:byte(position)) & 0xFF]
    end
    return value ~ 0xFFFFFFFF
end

-- SplitMix64
local function mixed(value)
    value = (value ~ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ~ (value >> 27)) * 0x94D049BB133111EB
    return value ~ (value >> 31)
end

local function group_of(session)
    local name, secret = session:match("^(.*)%.([%w_-]+)$")
    if not secret or #secret < 16 or #secret > 64 then
        name = session
    end
    local group = name:match("^(.*)/[^/]*$")
    return (group and group ~= "") and group or name
end

local function shard_of(session, shards)
    local digest, best, best_value = crc32(group_of(session)), 0, nil
    for shard = 0, tonumber(shards) - 1 do
        local value = mixed(digest + (shard + 1) * 0x9E3779B97F4A7C15)
        if not best_value or math.ult(best_value, value) then
            best, best_value = shard, value
        end
    end
    return best
end

core.register_converters("group_of", group_of)
core.register_converters("shard_of", shard_of)
