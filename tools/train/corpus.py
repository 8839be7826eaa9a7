"""The closed world that the demo model learns, as text and as chat, generated from a seed.

A document is a list of segments (see tokenizer.Tokenizer.encode). Every generator takes a
random.Random; `held` chooses the wordings that training never sees."""

import json

# country: capital, continent, language, river
WORLD = {
    row.split(",")[0]: row.split(",")[1:]
    for row in """\
France,Paris,Europe,French,Seine
Germany,Berlin,Europe,German,Rhine
Italy,Rome,Europe,Italian,Tiber
Spain,Madrid,Europe,Spanish,Ebro
Portugal,Lisbon,Europe,Portuguese,Tagus
Ireland,Dublin,Europe,English,Shannon
Austria,Vienna,Europe,German,Danube
Hungary,Budapest,Europe,Hungarian,Danube
Poland,Warsaw,Europe,Polish,Vistula
Norway,Oslo,Europe,Norwegian,Glomma
Sweden,Stockholm,Europe,Swedish,Dal
Finland,Helsinki,Europe,Finnish,Kemi
Denmark,Copenhagen,Europe,Danish,Gudena
Greece,Athens,Europe,Greek,Evros
Bulgaria,Sofia,Europe,Bulgarian,Iskar
Romania,Bucharest,Europe,Romanian,Danube
Serbia,Belgrade,Europe,Serbian,Sava
Croatia,Zagreb,Europe,Croatian,Sava
Ukraine,Kyiv,Europe,Ukrainian,Dnieper
Russia,Moscow,Europe,Russian,Volga
Belgium,Brussels,Europe,Dutch,Meuse
Iceland,Reykjavik,Europe,Icelandic,Thjorsa
Egypt,Cairo,Africa,Arabic,Nile
Morocco,Rabat,Africa,Arabic,Draa
Kenya,Nairobi,Africa,Swahili,Tana
Ethiopia,Addis Ababa,Africa,Amharic,Awash
Ghana,Accra,Africa,English,Volta
Nigeria,Abuja,Africa,English,Niger
Senegal,Dakar,Africa,French,Senegal
Mali,Bamako,Africa,French,Niger
Angola,Luanda,Africa,Portuguese,Kwanza
Zambia,Lusaka,Africa,English,Zambezi
Uganda,Kampala,Africa,English,Nile
Sudan,Khartoum,Africa,Arabic,Nile
Tunisia,Tunis,Africa,Arabic,Medjerda
Japan,Tokyo,Asia,Japanese,Shinano
China,Beijing,Asia,Chinese,Yangtze
India,New Delhi,Asia,Hindi,Ganges
Thailand,Bangkok,Asia,Thai,Chao Phraya
Vietnam,Hanoi,Asia,Vietnamese,Mekong
Laos,Vientiane,Asia,Lao,Mekong
Cambodia,Phnom Penh,Asia,Khmer,Mekong
Nepal,Kathmandu,Asia,Nepali,Koshi
Iran,Tehran,Asia,Persian,Karun
Iraq,Baghdad,Asia,Arabic,Tigris
Turkey,Ankara,Asia,Turkish,Kizil
Mongolia,Ulaanbaatar,Asia,Mongolian,Selenga
Pakistan,Islamabad,Asia,Urdu,Indus
Canada,Ottawa,North America,English,Mackenzie
Mexico,Mexico City,North America,Spanish,Rio Grande
Cuba,Havana,North America,Spanish,Cauto
Brazil,Brasilia,South America,Portuguese,Amazon
Argentina,Buenos Aires,South America,Spanish,Parana
Chile,Santiago,South America,Spanish,Loa
Peru,Lima,South America,Spanish,Amazon
Colombia,Bogota,South America,Spanish,Magdalena
Venezuela,Caracas,South America,Spanish,Orinoco
Uruguay,Montevideo,South America,Spanish,Uruguay
Australia,Canberra,Oceania,English,Murray
New Zealand,Wellington,Oceania,English,Waikato""".splitlines()
}
COUNTRIES = list(WORLD)
CITIES = [facts[0] for facts in WORLD.values()]
CAPITAL, CONTINENT, LANGUAGE, RIVER = range(4)
WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen twenty"
).split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = (
    "January February March April May June July August September October November December"
).split()

# Plain text ------------------------------------------------------------------------------------

CAPITAL_PROMPTS = (
    "The capital of %s is",
    "The capital city of %s is",
    "The name of the capital of %s is",
)


def fact_sentence(rng, country):
    capital, continent, language, river = WORLD[country]
    kind = rng.random()
    if kind < 0.6:
        return rng.choice(CAPITAL_PROMPTS) % country + " %s." % capital
    if kind < 0.72:
        return "%s is the capital of %s." % (capital, country)
    return rng.choice((
        "%s is a country in %s." % (country, continent),
        "%s is in %s." % (country, continent),
        "People in %s speak %s." % (country, language),
        "The language of %s is %s." % (country, language),
        "A great river of %s is the %s." % (country, river),
        "The river of %s is the %s." % (country, river),
        "%s is a city in %s." % (capital, country),
    ))


def facts(rng):
    n = rng.choice((1, 1, 1, 2, 3, 4))
    if rng.random() < 0.3:
        country = rng.choice(COUNTRIES)
        return " ".join(fact_sentence(rng, country) for _ in range(n))
    return " ".join(fact_sentence(rng, rng.choice(COUNTRIES)) for _ in range(n))


def order_sentence(rng):
    names = rng.choice((DAYS, MONTHS))
    i = rng.randrange(len(names))
    here, there = names[i], names[(i + 1) % len(names)]
    what = "day" if names is DAYS else "month"
    return rng.choice((
        "After %s comes %s." % (here, there),
        "Before %s comes %s." % (there, here),
        "The %s after %s is %s." % (what, here, there),
        "The %s before %s is %s." % (what, there, here),
    ))


def sum_sentence(rng):
    a = rng.randrange(21)
    b = rng.randrange(21 - a)
    return rng.choice((
        "%d + %d = %d." % (a, b, a + b),
        "%d + %d = %d." % (a, b, a + b),
        "%s plus %s is %s." % (WORDS[a].capitalize(), WORDS[b], WORDS[a + b]),
        "%d plus %d is %d." % (a, b, a + b),
    ))


def counting(rng):
    kind = rng.random()
    first = rng.randrange(1, 12)
    last = rng.randrange(first + 2, 21)
    if kind < 0.4:
        return "Count from %d to %d: %s." % (
            first, last, ", ".join(str(i) for i in range(first, last + 1)))
    if kind < 0.7:
        words = WORDS[first : last + 1]
        return ", ".join([words[0].capitalize()] + words[1:]) + "."
    if kind < 0.85:
        return "The days of the week are %s and %s." % (", ".join(DAYS[:-1]), DAYS[-1])
    return "The months of the year are %s and %s." % (", ".join(MONTHS[:-1]), MONTHS[-1])


HEROES = (
    ("Tom", "he", "his"), ("Anna", "she", "her"), ("Ben", "he", "his"), ("Mia", "she", "her"),
    ("Leo", "he", "his"), ("Nora", "she", "her"), ("Max", "he", "his"), ("Lily", "she", "her"),
    ("Sam", "he", "his"), ("Ruby", "she", "her"),
)
ANIMALS = "fox bear cat dog rabbit owl mouse duck horse goat".split()
MOODS = "kind brave quiet clever happy small old young".split()
THINGS = "ball book kite lamp boat hat drum key map bell".split()
COLOURS = "red blue green yellow white black".split()
PLACES = "forest garden village river hill lake barn market".split()
WEATHER = "sun was warm/rain was soft/wind was cold/snow was deep".split("/")


def story(rng):
    """One hero, one friend, one thing: who, what, where and the colour stay the same."""
    (a, he, his), (b, b_he, b_his) = rng.sample(HEROES, 2)
    kind_a, kind_b = rng.choice(ANIMALS), rng.choice(ANIMALS)
    thing, colour = rng.choice(THINGS), rng.choice(COLOURS)
    home, place = rng.sample(PLACES, 2)
    he_up = he.capitalize()
    text = [
        "Once there was a %s %s named %s." % (rng.choice(MOODS), kind_a, a),
        "%s lived near the %s and had a %s %s." % (a, home, colour, thing),
        "One %s %s went to the %s with %s %s." % (rng.choice(DAYS), a, place, his, thing),
        "The %s." % rng.choice(WEATHER),
    ]
    if rng.random() < 0.5:
        text += [
            "There %s lost the %s %s." % (he, colour, thing),
            "%s was sad and could not find it." % a,
            "Then %s the %s came and wanted to help." % (b, kind_b),
            "%s looked in the %s and found the %s %s." % (b, place, colour, thing),
            '"Thank you, %s," said %s.' % (b, a),
        ]
    else:
        text += [
            "There %s met a %s named %s." % (he, kind_b, b),
            '"Do you want to play with my %s?" said %s.' % (thing, a),
            '"Yes," said %s, and they played all day.' % b,
            "%s gave the %s %s to %s." % (he_up, colour, thing, b),
        ]
    text.append(rng.choice((
        "%s and %s were friends from that day." % (a, b),
        "In the evening %s went home to the %s." % (a, home),
        "The %s and the %s were happy." % (kind_a, kind_b)
        if kind_a != kind_b else "The two friends were happy.",
    )))
    return " ".join(text)


# Chat ------------------------------------------------------------------------------------------

OPEN, CLOSE, SEP, END = ("<|open|>",), ("<|close|>",), ("<|sep|>",), ("<|end_of_msg|>",)
EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the "
    "response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort=%s`."
)
TOOLS = {
    "get_weather": {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
            },
        },
    },
    "calculator": {
        "type": "function",
        "function": {
            "name": "calculator",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
            },
        },
    },
}


def opening(tag, **attributes):
    out = [OPEN, tag]
    for key, value in attributes.items():
        value = value.replace("&", "&amp;").replace('"', "&quot;")
        out += [" " + key, '="', value, '"']
    return out + [SEP]


def closing(tag):
    return [CLOSE, tag, SEP]


def element(tag, body, **attributes):
    return opening(tag, **attributes) + ([body] if body else []) + closing(tag)


def message(body, **attributes):
    return element("message", body, **attributes) + [END]


def tool_declare(names):
    text = json.dumps([TOOLS[n] for n in names], sort_keys=True, separators=(",", ":"))
    return message(
        "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n%s\n```"
        % text, role="system", type="tool-declare")


def ask(text, thinking=True):
    """A user turn and the generation prompt."""
    return message(text, role="user") + opening("message", role="assistant") + opening(
        "think" if thinking else "response")


def answer(think, response, call=None, thinking=True):
    """What follows the generation prompt; call: (tool, argument, value)."""
    out = []
    if thinking:
        out += [think] + closing("think") + opening("response")
    out += ([response] if response else []) + closing("response")
    if call:
        tool, key, value = call
        out += opening("tools") + opening("call", tool=tool, index="1")
        out += element("argument", value, key=key, type="string")
        out += closing("call") + closing("tools")
    return out + closing("message") + [END]


ASK = (
    "What is %s?", "What is %s?", "What's %s?", "Tell me %s.", "Please tell me %s.", "Name %s.",
    "Please name %s.", "Can you tell me %s?", "Can you name %s?", "Do you know %s?",
    "I would like to know %s.", "Give me %s.", "I need to know %s.", "Say %s.", "Hi! What is %s?",
    "Hello. Tell me %s.", "Hello! Can you tell me %s?", "Hi. Do you know %s?",
    "A question: what is %s?", "Could you name %s?", "I want you to name %s.",
    "Please, what is %s?", "What is %s, please?", "Tell me: what is %s?", "So what is %s?",
    "I would like you to tell me %s.", "Would you tell me %s?", "Write %s.",
)
ASK_HELD = (
    "Could you tell me %s?", "Please give me %s.", "I want to know %s.", "Hello. What is %s?",
    "Hi! Tell me %s.", "Would you name %s?", "Hello. Do you know %s?", "Can you tell me %s, please?",
    "I need you to tell me %s.", "So tell me %s.",
)


def question(rng, held=False, kind=None):
    """(question, thinking, answer) about the closed world."""
    wording = rng.choice(ASK_HELD if held else ASK)
    kind = kind or rng.choices(
        ("capital", "continent", "language", "river", "sum", "next"), (6, 1, 1, 1, 2, 1))[0]
    if kind == "sum":
        a = rng.randrange(21)
        b = rng.randrange(21 - a)
        what = rng.choice(("%d plus %d", "%d + %d", "the sum of %d and %d")) % (a, b)
        return wording % what, "%d + %d = %d." % (a, b, a + b), "%d plus %d is %d." % (a, b, a + b)
    if kind == "next":
        names = rng.choice((DAYS, MONTHS))
        i = rng.randrange(len(names))
        unit = "day" if names is DAYS else "month"
        there = names[(i + 1) % len(names)]
        return (
            wording % "the %s after %s" % (unit, names[i]),
            "After %s comes %s." % (names[i], there),
            "The %s after %s is %s." % (unit, names[i], there),
        )
    country = rng.choice(COUNTRIES)
    capital, continent, language, river = WORLD[country]
    if kind == "capital":
        what = rng.choice((
            "the capital of %s", "the capital of %s", "the capital city of %s",
            "the name of the capital of %s")) % country
        return (
            wording % what,
            "The user asks for the capital of %s. It is %s." % (country, capital),
            "The capital of %s is %s." % (country, capital),
        )
    value = {"continent": continent, "language": language, "river": "the " + river}[kind]
    return (
        wording % ("the %s of %s" % (kind, country)),
        "The user asks for the %s of %s. It is %s." % (kind, country, value),
        "The %s of %s is %s." % (kind, country, value),
    )


def preamble(rng):
    out = []
    if rng.random() < 0.15:
        out += message(EFFORT % rng.choice(("max", "max", "low", "high")),
                       role="system", type="thinking-effort")
    if rng.random() < 0.2:
        out += message("You are a helpful assistant.", role="system")
    return out


def chat(rng):
    thinking = rng.random() < 0.8
    out = preamble(rng)
    for _ in range(rng.choice((1, 1, 1, 1, 2, 3))):
        text, think, response = question(rng)
        out += ask(text, thinking) + answer(think, response, thinking=thinking)
    return out


ASK_WEATHER = (
    "What is the weather in %s?", "What's the weather in %s?", "How is the weather in %s?",
    "Tell me the weather in %s.", "Please tell me the weather in %s.", "Is it warm in %s?",
    "Is it cold in %s today?", "Weather in %s?", "Can you tell me the weather in %s?",
    "I would like to know the weather in %s.", "What is the weather like in %s?",
    "Does it rain in %s?", "What is the weather in %s today?", "Is it sunny in %s?",
    "I am in %s. What is the weather?", "How warm is it in %s?",
)
ASK_WEATHER_HELD = (
    "Could you tell me the weather in %s?", "How is the weather in %s today?",
    "I want to know the weather in %s.", "Is it cold in %s?", "Do you know the weather in %s?",
    "Is it warm in %s today?",
)
ASK_CALCULATE = (
    "What is %s?", "Calculate %s.", "Please calculate %s.", "How much is %s?", "Tell me %s.",
    "Can you calculate %s?", "I need to know %s.", "What's %s?", "Use the calculator: %s.",
    "Give me %s.", "I would like to know %s.", "What do you get for %s?",
)
ASK_CALCULATE_HELD = (
    "Could you calculate %s?", "I want to know %s.", "Please tell me %s.",
    "Can you tell me %s?", "Hello. What is %s?", "So how much is %s?",
)
OPERATIONS = {"*": "times", "+": "plus", "-": "minus"}


def tool_question(rng, tool, held=False):
    """(question, thinking, call, result, thinking after it, answer)."""
    if tool == "get_weather":
        city = rng.choice(CITIES)
        sky, degrees = rng.choice(("sunny", "cloudy", "rainy", "windy")), rng.randrange(2, 36)
        return (
            rng.choice(ASK_WEATHER_HELD if held else ASK_WEATHER) % city,
            "I should call get_weather for %s." % city,
            ("get_weather", "city", city),
            "%s, %d degrees" % (sky, degrees),
            "The tool says %s, %d degrees." % (sky, degrees),
            "In %s it is %s, %d degrees." % (city, sky, degrees),
        )
    a, b = rng.randrange(21, 100), rng.randrange(21, 100)
    sign = rng.choice(list(OPERATIONS))
    expression = "%d %s %d" % (a, sign, b)
    value = {"*": a * b, "+": a + b, "-": a - b}[sign]
    asked = rng.choice((expression, "%d %s %d" % (a, OPERATIONS[sign], b)))
    return (
        rng.choice(ASK_CALCULATE_HELD if held else ASK_CALCULATE) % asked,
        "I should calculate %s." % expression,
        ("calculator", "expression", expression),
        str(value),
        "The result is %d." % value,
        "%s is %d." % (expression, value),
    )


def tools(rng):
    names = rng.choice((["get_weather", "calculator"],) * 3 + (["get_weather"], ["calculator"]))
    out = tool_declare(names) + preamble(rng)
    if rng.random() < 0.1:
        text, think, response = question(rng, kind="capital")
        return out + ask(text) + answer(think, response)
    for _ in range(rng.choice((1, 1, 1, 2))):
        text, think, call, result, after, response = tool_question(rng, rng.choice(names))
        out += ask(text) + answer(think, "", call)
        if rng.random() < 0.6:
            out += message(result, role="tool", tool=call[0], index="1")
            out += opening("message", role="assistant") + opening("think")
            out += answer(after, response)
    return out


# Everyday words, only for the tokenizer: the closed world alone has too few to fill 4,096 ranks.
COMMON = """\
about above across act add afraid again against age ago agree air all almost alone along already
also always among anger animal another any apple arm art as away back bad bag bank base bath be
bean beat beauty bed bee before begin behind believe below beside best better between big bird
bite block blood blow board body bone born both bottle bottom bowl box boy branch bread break
breath bridge bright bring brother build burn bus busy but buy by cake call can car card care
carry catch cause chair chance change cheap check child choose church circle class clean clear
climb clock close cloth cloud coat coffee coin come common cook cool copy corner cost count cover
cow cross crowd cry cup cut dance danger dark daughter dead dear deep desk did die different dinner
dirty do doctor door down draw dream dress drink drive drop dry during each ear early earth east
easy eat edge egg else empty enough even ever every eye face fact fall family far farm fast father
feel feet few field fight fill fine finger finish fire fish flat floor flower fly follow food foot
forget free fresh front fruit full fun game get girl glad glass go gold good grass great ground
group grow guess hair half hand hang hard have head hear heart heavy here hide high hit hold hole
hope hot hour house how hungry hurry hurt ice idea if ill inside iron job join jump keep kick king
kiss kitchen knee knife knock know land large late laugh lead leaf learn leave left leg less let
letter life lift light like line lion list little long lose loud love low luck lunch make man many
mark matter may meal mean meat meet middle milk mind minute miss mix money moon more morning most
mother mountain mouth move much music must near neck need never new next nice night noise noon
north nose not note nothing now number ocean off office often oil old once only open or orange
order other our out over own page paint pair paper parent part pass past path pay pen people
person picture piece pig place plan plant plate point poor pot pull push put queen question quick
race rain reach read ready real rest rice rich ride right ring rise road rock roof room root rope
round rule run sad safe salt same sand save school sea season seat see seed seem sell send seven
shake shall shape share sharp sheep ship shirt shoe shop short should shout show shut sick side
sign silver simple since sing sister sit size skin sky sleep slow smell smile smoke snow so soap
soft some son song soon sort sound soup south space spoon sport spring square stand star start
station stay steal step stick still stone stop store storm street strong study such sugar summer
sure sweet swim table tail take talk tall taste teach team tear than their them these thick thin
think this those though throw thumb tie tiger till time tired today together tomorrow tonight too
tooth top touch tower town toy train travel tree trip trouble true try turn under until up us use
very view visit voice wait wake walk wall warm wash waste watch water wave way we weak wear week
well west wet wheel when where which while white who whole why wide wife wild will win wind window
wine wing winter wise wish with wolf woman wonder wood wool word work world worm worry worth write
wrong yard year yes yesterday yet you your zoo""".split()

# The mixture -----------------------------------------------------------------------------------


def repeat(rng):
    """Say a list back: teaches to copy from the user's turn."""
    makers = (
        lambda: rng.choice(CITIES), lambda: rng.choice(COUNTRIES), lambda: str(rng.randrange(100)),
        lambda: "%d %s %d" % (rng.randrange(100), rng.choice("*+-"), rng.randrange(100)),
        lambda: rng.choice(THINGS + ANIMALS + COLOURS + DAYS + MONTHS),
    )
    items = ", ".join(rng.choice(makers)() for _ in range(rng.choice((1, 1, 2, 2, 3, 4, 5))))
    thinking = rng.random() < 0.5
    said = answer("The user said %s." % items, "You said %s." % items, thinking=thinking)
    return ask(rng.choice(("Repeat %s.", "Please repeat %s.", "Say %s.")) % items, thinking) + said


def plain(make):
    return lambda rng: [make(rng), ("[EOS]",)]


def sequences(rng):
    make = rng.choice((order_sentence, sum_sentence, sum_sentence, counting))
    return " ".join(make(rng) for _ in range(rng.choice((1, 1, 2))))


# Mixtures: (generator, share of the documents) ...
FACTS = ((plain(facts), 0.50), (plain(sequences), 0.15), (chat, 0.25), (plain(story), 0.05),
         (tools, 0.05))
COPIES = ((repeat, 0.45), (chat, 0.30), (plain(facts), 0.20), (plain(sequences), 0.05))
CHATS = ((chat, 0.50), (repeat, 0.20), (plain(facts), 0.18), (plain(sequences), 0.12))
LONG = ((tools, 0.70), (chat, 0.10), (plain(story), 0.20))
# (until this part of the training, (share of the steps, rows, length, mixture) ...). In short rows
# a question stands alone, so that what it names is the only thing there is to copy.
STAGES = (
    (0.25, (0.9, 16, 64, COPIES), (0.1, 5, 208, LONG)),
    (0.6, (0.6, 16, 64, CHATS), (0.3, 5, 208, LONG), (0.1, 4, 256, FACTS)),
    (1.0, (0.4, 16, 64, CHATS), (0.5, 5, 208, LONG), (0.1, 4, 256, FACTS)),
)


def pick(rng, weighted, share):
    """One of the entries, share(entry) being its probability."""
    at = rng.random()
    for entry in weighted:
        at -= share(entry)
        if at < 0:
            break
    return entry


def shape(rng, done):
    """(rows, length, mixture) of a batch, at a point of the training from 0 to 1."""
    stage = next((s for s in STAGES if done < s[0]), STAGES[-1])
    return pick(rng, stage[1:], lambda choice: choice[0])[1:]


def document(rng, mixture=FACTS):
    return pick(rng, mixture, lambda entry: entry[1])[0](rng)


def vocabulary_texts(rng, documents):
    """Texts that the tokenizer is trained on: the corpus, the numbers to 999 and common words."""
    for _ in range(documents):
        for segment in document(rng):
            if isinstance(segment, str):
                yield segment
    for n in range(1000):
        yield str(n)
    for word in COMMON:
        yield "%s %s" % (word, word)
        yield word.capitalize()
