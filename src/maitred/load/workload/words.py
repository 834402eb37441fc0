"""Words of prompts: short and common, so that most vocabularies have one token for each."""

WORDS: tuple[str, ...] = tuple(
    """
    able about above act add after again age ago agree air all allow almost alone along already also always among
    amount and animal another answer any apart appear apple area arm army around arrive art ask attack away baby back
    bad bag ball band bank bar base basic battle bay be bear beat beautiful became because bed been before began
    begin behind being believe below best better between big bird bit black block blood blue board boat body bone book
    born both bottle bottom box boy branch bread break bridge bright bring broke broken brother brought brown build
    building built burn business busy but buy by call came camp can capital car card care carry case cat catch cause
    cell center central century certain chair chance change chapter charge chart check chief child children choice
    choose church circle city claim class clean clear climb clock close cloth cloud club coast coat code cold collect
    color come common company compare complete condition consider contain continue control cook cool copy corn corner
    correct cost could council count country couple course court cover create cross crowd cry cup current cut daily
    dance danger dark data date daughter day dead deal dear death decide deep degree depend describe desert design
    desk develop did die differ difference dinner direct discover do doctor does dog dollar done door double doubt down
    draw dream dress drink drive drop dry during dust duty each ear early earth ease east easy eat edge effect egg
    eight either else empire end enemy energy engine enjoy enough enter equal escape even evening event ever every
    exact example except expect experience explain express eye face fact fail fair fall family famous far farm fast
    father favor fear feed feel feet fell felt few field fight figure fill final find fine finger finish fire firm
    first fish fit five flat floor flow flower fly follow food foot for force foreign forest forget form forward found
    four frame free fresh friend from front fruit full fun future game garden gas gate gather gave general gentle get
    girl give glass go goal god gold gone good got government grand grass great green ground group grow guard guess
    guide gun had hair half hall hand happen happy hard has hat have he head health hear heart heat heavy held help her
    here high hill him his history hit hold hole home honor hope horse hospital hot hotel hour house how huge human
    hundred hunt hurry ice idea if image imagine important in inch include increase industry inside instead interest
    into iron island issue it job join judge jump just keep kept key kill kind king kitchen knew know known lady lake
    land language large last late laugh law lay lead leader learn least leave led left leg length less let letter level
    library lie life light like limit line lip list listen little live local long look lord lose loss lost lot love
    low machine made main major make man many map march mark market master match material matter may me mean measure
    meat media medical meet member memory men mention message metal method middle might mile military milk mind mine
    minute miss model modern moment money month moon more morning most mother motion mountain mouth move movement much
    music must my name narrow nation natural nature near necessary neck need never new news next night nine no noise
    none nor north nose not note nothing notice now number object ocean of off offer office officer often oil old on
    once one only open operation opinion or order other our out outside over own page pain paint pair paper parent park
    part party pass past path pattern pay peace people perhaps period person phone picture piece place plain plan plane
    plant play player please point police poor popular population position possible post pound power present president
    press pretty price private problem process produce product program protect prove provide public pull purpose push
    put quality queen question quick quiet quite race radio rain raise ran rate rather reach read ready real reason
    receive record red region remain remember reply report rest result return rich ride right ring rise river road rock
    role roll roof room root rose round row rule run safe said sail salt same sand sat save saw say scale school
    science sea search season seat second secret section see seem seen sell send sense sent serve service set settle
    seven several shade shall shape share sharp she ship shirt shoe shop short shot should shoulder shout show side
    sight sign silence silver similar simple since sing single sister sit six size skin sky sleep slow small smile snow
    so social soft soil soldier some son song soon sort sound source south space speak special speech speed spend spirit
    spoke spot spread spring square staff stage stand star start state station stay steel step still stone stood stop
    store storm story straight strange street strength strong student study subject success such sudden sugar sum
    summer sun supply support sure surface surprise sweet system table take talk tall task taste tax teach teacher team
    tell ten term test than thank that the their them then there these they thick thin thing think third this those
    though thought thousand three through throw thus time tiny title to today together told tone too took tool top total
    touch toward town track trade train travel treat tree trial trip trouble truck true trust truth try turn twelve
    twenty two type under union unit until up upon use usual valley value various very video view village visit voice
    vote wait walk wall want war warm was wash watch water wave way we weak wear weather week weight well went were west
    what wheel when where which while white who whole whose why wide wife wild will win wind window wine winter wish
    with within without woman wonder wood word work world worth would write wrong yard year yes yet you young your
    """.split()  # noqa: SIM905 - a thousand words read better as text
)
